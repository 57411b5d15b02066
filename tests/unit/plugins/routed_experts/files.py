"""`.npy` files as NumPy and vLLM write them, without either."""

import base64
import math


def npy(shape: tuple[int, ...], descr: str = "|u1", *, fortran: bool = False, version: int = 1) -> bytes:
    """A file whose bytes count from 0."""
    header = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}"
    header += " " * (-(10 + len(header) + 1) % 64) + "\n"
    head = b"\x93NUMPY" + bytes((version, 0)) + len(header).to_bytes(2, "little")
    return head + header.encode() + counted(math.prod(shape) * int(descr[-1]))


def counted(size: int) -> bytes:
    """That many bytes: 0, 1, … 250, 0, …"""
    return bytes(i % 251 for i in range(size))


def encoded(shape: tuple[int, ...], descr: str = "|u1") -> str:
    """A file in base64, as vLLM's reply holds it."""
    return base64.b64encode(npy(shape, descr)).decode()
