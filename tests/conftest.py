"""What every test starts from: no settings of this machine's user, no network."""

import os

for name in [name for name in os.environ if name.startswith("SGLANG_DSPARK_") or name == "SGLANG_PLUGINS"]:
    del os.environ[name]
os.environ["HF_HUB_OFFLINE"] = "1"
