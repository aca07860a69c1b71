"""The colours of the book; `paged.lab.notebook` says what each of them means."""

COLORS = {
    "used": "#2f81c7", "shared": "#8a63d2", "free": "#98a3ae", "reserved": "#d4a017",
    "internal": "#e07b39", "external": "#c93c54", "new": "#1f9d78"
}
