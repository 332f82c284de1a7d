"""`python -m agenticrun_operator`."""

from agenticrun_operator.main import main

if __name__ == "__main__":
    main()
