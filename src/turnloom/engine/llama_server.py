"""To be written."""

from __future__ import annotations

from turnloom.engine.sglang import SGLangEngine


class LlamaServerEngine(SGLangEngine):
    pass
