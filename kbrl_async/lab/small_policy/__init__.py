"""The project's own small policy: made from nothing, so that the whole system runs where there is no model.

Owns the grammar of the suite (`ops`, `specs`), the author who writes right, wrong, slow and fast C answers (`author`,
`families`, `cuda`), the corpus drawn from them (`corpus`) and the making of a Qwen2-architecture model with its own
tokenizer (`making`). Never touches a socket, and never sees a held-out problem while writing the corpus.
"""
