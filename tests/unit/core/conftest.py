"""How hypothesis runs here: machines that build other things at the same time are slow, and that is no failure."""

from hypothesis import HealthCheck, settings

settings.register_profile("core", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("core")
