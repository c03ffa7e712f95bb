"""Methods that draft from text that is already there, without any weights."""
