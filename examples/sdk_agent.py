"""An agent on the official anthropic SDK, run against a gateway, and the training samples of its run.

    python examples/sdk_agent.py "list the files here"

The agent is one file, `turnloom/harness/sdk_agent.py`: three tools and a loop. It asks
nothing of Turnloom: all that it is given is a base URL and a key. Needs the
extras `agent` and `local`; with `--engine http://HOST:30000` it runs on SGLang.
"""

import argparse
import os
import subprocess
import sys

from turnloom import Gateway, Sampling


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt")
    parser.add_argument("--engine", default="local:smollm2")
    options = parser.parse_args()
    with Gateway.background(engine=options.engine) as gateway:
        # For training, sample at 1.0; a model as small as the embedded one then writes noise.
        session = gateway.open_session(sampling=Sampling(temperature=0.2))
        agent = [sys.executable, "-m", "turnloom.harness.sdk_agent", "--max-tokens", "256", options.prompt]
        ended = subprocess.run(agent, env={**os.environ, **session.env}, timeout=600)
        for sample in session.finish():
            trained = int(sample.loss_mask.sum())
            print(f"sample {sample.sample_index}: {len(sample.token_ids)} tokens, {trained} trained, {sample.statuses}")
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
