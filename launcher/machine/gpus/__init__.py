"""The GPUs of this machine, found without ever starting their runtime. Start reading at visible.py."""
