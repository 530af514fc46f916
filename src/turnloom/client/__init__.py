"""Clients of a gateway: the same calls whether it is in this process or elsewhere, and whether the caller is async or not."""

from turnloom.client.contract import BlockingGatewayClient, BlockingSessionClient, GatewayClient, SessionClient

__all__ = ["BlockingGatewayClient", "BlockingSessionClient", "GatewayClient", "SessionClient"]
