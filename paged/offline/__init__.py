"""Many requests from a file, their results into another: `python -m paged batch`."""
