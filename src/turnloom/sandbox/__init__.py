"""Where an agent runs.

A sandbox is a place with a working directory and a home, in which commands run
and files are kept until it is stopped. `contract` says what every backend
promises, `conformance` proves it for any backend, `local` is the one that needs
nothing. How strongly a sandbox keeps its processes in is the backend's to say;
`local` does not.
"""

from turnloom.sandbox.contract import ExecResult, Sandbox, SandboxUnavailable
from turnloom.sandbox.local import LocalSandbox

__all__ = ["ExecResult", "LocalSandbox", "Sandbox", "SandboxUnavailable"]
