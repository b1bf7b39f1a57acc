"""Tool servers over office files: plain functions of a world folder, and one MCP server that offers them."""
