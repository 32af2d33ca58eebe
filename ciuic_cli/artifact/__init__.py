"""The artifact on disk: config section, byte layout, writer, publishing, reader and verification."""
