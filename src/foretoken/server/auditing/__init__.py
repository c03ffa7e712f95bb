"""Whether speculation still writes what plain decoding would: answers decoded again when idle."""
