"""Optional tools around a run; nothing but the command line imports them."""
