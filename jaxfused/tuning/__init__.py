"""Choice by measurement: tables of what was fastest on a device, and the tuner that writes them."""
