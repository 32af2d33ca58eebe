"""The artifact on disk: its schema, its layout to the byte, its writer and its reader."""
