"""Run the small agent that ships with Turnloom against any Anthropic-shaped endpoint.

    ANTHROPIC_BASE_URL=http://127.0.0.1:8800/s/KEY ANTHROPIC_API_KEY=KEY python examples/sdk_agent.py "list the files here"

The agent is one file, `turnloom/harness/sdk_agent.py`: three tools and a loop on
the official SDK. Read it to see what an agent needs to know of Turnloom: nothing.
"""

import sys

from turnloom.harness.sdk_agent import main

if __name__ == "__main__":
    sys.exit(main())
