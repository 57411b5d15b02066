"""The plugins that come with headrace, one folder each; every one is loaded by its entry point."""
