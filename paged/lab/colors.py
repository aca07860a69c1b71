"""The colours of the book; `paged.lab.notebook` says what each of them means.

On used, shared, external and new stands white text, on the others `DARK`: at 4.5 to 1 or more. The
same colours are drawn on white and on near black. Text in one of the colours is darker on white and
lighter on near black: `INKS`, as (on white, on near black).
"""

COLORS = {
    "used": "#2a76b8", "shared": "#8560cc", "free": "#98a3ae", "reserved": "#d4a017",
    "internal": "#e07b39", "external": "#c93c54", "new": "#16805f"
}
DARK = "#10161d"
INK = "#5f6b78"  # text and axes of plots
INKS = {
    "used": ("#2368a4", "#6cb0ea"), "shared": ("#7a50c6", "#b79cf0"),
    "free": ("#5f6b78", "#a7b2bd"), "reserved": ("#7d5d00", "#e3b740"),
    "internal": ("#a84e13", "#f09a60"), "external": ("#b92f48", "#f07f92"),
    "new": ("#127253", "#4cc39e"), "plot": (INK, "#b6c0ca")
}
