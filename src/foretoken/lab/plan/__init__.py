"""Planning before anything is measured, by arithmetic on a model's shape and a device's data sheet:
every number that is an assumption is named as one in the result."""
