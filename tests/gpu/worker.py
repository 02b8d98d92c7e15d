"""Answer the cases of a step: ``python -m tests.gpu.worker ADDRESS MODULE [WORDS]``."""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

from cupyconv import arrays, measuring
from cupyconv.bench import environment
from cupyconv.gpu import compiler
from tests.gpu import contenders
from tests.gpu.running import LINES_VARIABLE


def main(address: str, module: str, *words: str) -> None:
    """Answer questions until there are no more, or the GPU's context is lost."""
    if os.environ.get(LINES_VARIABLE):
        compiler.OPTIONS = (*compiler.OPTIONS, "-lineinfo")
    step: Any = import_module(module)

    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    stream = connection.makefile("rw", encoding="utf-8")

    def serve() -> None:
        for line in stream:
            question = json.loads(line)
            if "list" in question:
                answer = {"cases": step.cases(*words)}
                if question["about"]:
                    place = contenders.place()
                    contenders.find_torch()  # whose cuDNN is described
                    answer["about"] = environment.describe(place, program="python -m tests.gpu")
            else:
                answer = answer_of(step.run, question)
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
            if answer.get("lost"):
                os._exit(1)  # nothing runs in this context, and its objects cannot be freed

    getattr(step, "serve", lambda serve: serve())(serve)


def answer_of(run: Callable[[dict[str, Any]], dict[str, Any]], case: dict[str, Any]) -> Any:
    """Return a case's record: "passed" and the result of ``run``, or "failed" and the error."""
    try:
        answer = {"state": "passed", **run(case)}
        if arrays.device_count():
            arrays.cupy().cuda.get_current_stream().synchronize()
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        answer = {"state": "failed", "detail": f"{type(error).__name__}: {text}"[-2000:]}
        traceback.print_exc()
    if arrays.device_count() and measuring.lost():
        answer |= {"lost": True, "detail": f"context lost: {answer.get('detail', '')}"}
    return answer


if __name__ == "__main__":
    main(*sys.argv[1:])
