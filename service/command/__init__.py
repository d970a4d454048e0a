"""The command line's subcommands and what starts the application."""
