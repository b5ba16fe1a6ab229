"""The formats that problem sets come in, one module each: `read(place) -> Iterator[Found]`."""
