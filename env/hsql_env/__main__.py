"""`python -m hsql_env` is the `hsql-env` command."""

from hsql_env.cli import main

if __name__ == "__main__":
    main()
