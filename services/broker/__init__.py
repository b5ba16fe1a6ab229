"""The broker: two ROUTERs, the ledger between them, and a journal that makes it survive `kill -9`."""
