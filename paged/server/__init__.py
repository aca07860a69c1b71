"""A model behind the HTTP interface that OpenAI's clients speak: `python -m paged serve`.

    door      who may come in, with what: keys, sizes, a server that is about to end
    fields    what a request may ask, field by field, and what is refused by name
    desk      a request on its way: its place in the queue, its call, its end
    answers   what the engine gives, in the forms of the interface
    meters    figures for /metrics
    app       the routes; the page at /
    command   the process: options, signals, its end
"""
