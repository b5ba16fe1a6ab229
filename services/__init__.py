"""The processes: one thin actor each, run as `python -m services.NAME`."""
