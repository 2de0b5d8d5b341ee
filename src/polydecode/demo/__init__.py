"""The demo: a real model converted, trained, measured and compared in one command."""
