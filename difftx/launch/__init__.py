"""Cost estimates for devices that are not attached, and sweeps of many training runs."""
