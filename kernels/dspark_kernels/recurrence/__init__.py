"""Recurrent layers of hybrid targets: verification leaves their states alone, the commit replays the accepted rows."""
