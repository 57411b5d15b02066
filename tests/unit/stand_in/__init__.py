"""The stand-in worker, driven over real sockets by stock clients."""
