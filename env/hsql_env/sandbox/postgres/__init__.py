"""PostgreSQL as a second environment plane: the same executions, failures and tables out."""
