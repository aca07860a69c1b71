"""A scene of the theatre in a page that is no notebook, recorded while the book is built:

    ```{scene} first-prompt
    ```
"""

from __future__ import annotations

from docutils import nodes
from docutils.parsers.rst import Directive


class Scene(Directive):
    """Plays a scene with the default model and shows it. An unknown name is an error."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        from paged.lab.theatre.scenes import SCENES, default_model, play
        from paged.lab.theatre.show import fragment
        (slug,) = self.arguments
        if slug not in SCENES:
            raise self.error(f"no scene {slug!r}: there are {', '.join(SCENES)}")
        return [
            nodes.raw("", fragment([play(SCENES[slug], default_model())], wide=True), format="html")
        ]


def setup(app):
    app.add_directive("scene", Scene)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
