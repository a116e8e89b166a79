"""SQL environment for agents: real databases, four tools, a verdict. Needs no tensor library."""
