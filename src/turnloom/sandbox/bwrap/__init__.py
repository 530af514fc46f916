"""The parts of the bubblewrap sandbox: what is seen inside, how a command is held and ended, its network, its limits."""
