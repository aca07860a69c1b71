"""A replica without a model, which light workers can import: it does what a line's body says."""

import asyncio
import os


class FakeReplica:
    """Answers with the number of its process; a body "die" ends the process."""

    def __init__(self, model, name, arguments):
        if model == "broken":
            raise ValueError("there is no such model")

    async def ready(self):
        """Returns when there is one."""

    async def answer(self, line):
        """The line's result, or what the line demands."""
        await asyncio.sleep(0.02)
        if line.body == "die":
            os._exit(1)
        if line.body == "fail":
            raise RuntimeError("too hard")
        return {"id": line.id, "response": {"status_code": 200, "body": os.getpid()}}
