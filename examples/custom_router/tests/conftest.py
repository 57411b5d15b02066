pytest_plugins = ["core.testing.fixtures"]
