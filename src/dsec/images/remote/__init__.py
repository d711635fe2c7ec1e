"""Layers whose data is in a store and comes when it is read: split images, chunks, stores, the filler."""
