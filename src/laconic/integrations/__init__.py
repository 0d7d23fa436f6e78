"""laconic in other libraries' training loops. Import the module for the library that you use:
``laconic.integrations.transformers``, ``.accelerate`` or ``.lightning``."""
