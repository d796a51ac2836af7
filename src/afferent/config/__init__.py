"""Settings: each is declared once; its flag, variable, key, help text and page follow from that.

- `settings` declares the server's.
- `loading` reads them from flags, the environment and a TOML file.
- `describe` writes their help.
- `hints` suggests corrections for mistyped names.
"""

from afferent.config.declaring import Group, Setting, Settings, declared, setting
from afferent.config.loading import Loaded, load, peek
from afferent.config.settings import Limits, ModalityLimits, RequestLimits, ServeConfig, Tenant
from afferent.config.sizes import parse_nbytes

__all__ = [
    "Group",
    "Limits",
    "Loaded",
    "ModalityLimits",
    "RequestLimits",
    "ServeConfig",
    "Setting",
    "Settings",
    "Tenant",
    "declared",
    "load",
    "parse_nbytes",
    "peek",
    "setting",
]
