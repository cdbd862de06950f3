"""`python -m fairseq_el` is `fairseq-el`."""

from fairseq_el.cli.main import main

if __name__ == "__main__":
    main()
