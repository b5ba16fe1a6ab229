"""Somebody's own parts, one file each: what docs/howto-extend.md shows. Nothing of kbrl-async knows of them."""
