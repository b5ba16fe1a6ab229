"""`kbrl rehearse`: a run at a model's real shape without its weights. `answers` are what is said, `model` makes a
folder of random weights with a tokenizer, `findings` says where time went.
"""
