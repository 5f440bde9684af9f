"""Local SGD: replicas step by themselves and are averaged every so many steps."""
