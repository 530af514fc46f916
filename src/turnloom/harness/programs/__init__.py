"""Small agents on frameworks of others. Each file runs with the Python its framework is installed in, and imports nothing of ours."""
