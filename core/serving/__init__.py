"""How headrace is hosted: the ASGI application, and the server behind `headrace serve`."""
