"""An artifact's weights in the formats of other programs."""
