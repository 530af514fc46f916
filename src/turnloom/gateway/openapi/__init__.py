"""The OpenAPI 3.1 document of the routes that agents use: what each dialect honours, what it refuses, and what it answers.

Limits, error statuses and error bodies are taken from the code that holds to
them. The admin API is not in it.
"""

from turnloom.gateway.openapi.document import document

__all__ = ["document"]
