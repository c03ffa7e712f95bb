"""EAGLE-3 and P-EAGLE: the network, its published files, its compiled twin, parallel drafts."""
