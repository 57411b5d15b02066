"""TLS towards a worker: from files to a context that offers HTTP/2 only."""

import ssl
from pathlib import Path

from msgspec import Struct


class TLSFiles(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the certificates of a TLS connection lie (PEM files). `cert` and `key` together make it mutual.

    They are read once, when the channel is opened.
    """

    #: Authorities that may have signed the worker's certificate; None: those that the system trusts.
    ca: str | None = None
    #: Our certificate chain, for a worker that asks for one.
    cert: str | None = None
    #: The private key of `cert`; None: it lies in the same file.
    key: str | None = None
    #: The name that the worker's certificate must carry; None: the host that is connected to.
    server_name: str | None = None

    def context(self) -> ssl.SSLContext:
        """The client's TLS context: at least TLS 1.2, ALPN `h2`.

        Raises: `ValueError` naming the field and the file that can't be used.
        """
        if self.key is not None and self.cert is None:
            raise ValueError("tls.key is set but tls.cert is not; mutual TLS needs both")
        for field, path in (("ca", self.ca), ("cert", self.cert), ("key", self.key)):
            if path is not None and not Path(path).is_file():
                raise ValueError(f"tls.{field}: there is no file {path!r}")
        try:
            context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=self.ca)
        except ssl.SSLError as error:
            raise ValueError(f"tls.ca: {self.ca!r} holds no usable certificate ({error})") from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        if self.cert is not None:
            try:
                context.load_cert_chain(self.cert, self.key)
            except ssl.SSLError as error:
                raise ValueError(f"tls.cert, tls.key: {self.cert!r} can't be used ({error})") from error
        return context
