"""A small MCP server, a shop's price list: over stdio, or with `mcp_server.py PORT` over HTTP."""

import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

PRICES = {
    "lamp": 34,
    "kettle": 27,
    "blanket": 41,
    "teapot": 19,
    "basket": 13,
    "mirror": 58,
    "candle": 4,
    "stool": 36,
    "rug": 75,
    "clock": 62,
}
DELIVERY = {"Oskary": 11, "Brindo": 7, "Harnvel": 16, "Pellany": 22, "Ruddick": 9}

# Wrong calls are ordinary: no traceback for each.
server = MCPServer("shop", log_level="CRITICAL")


@server.tool()
def price(item: str) -> int:
    """The price of one item, in coins."""
    return look_up(item, PRICES)


@server.tool()
def delivery(town: str) -> int:
    """The cost of a delivery to a town, in coins."""
    return look_up(town, DELIVERY)


def look_up(name: str, table: dict[str, int]) -> int:
    if name not in table:
        # The one exception whose text is sent.
        raise ToolError(f"no {name!r}; there are: {', '.join(table)}")
    return table[name]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
