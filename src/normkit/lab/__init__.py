"""The lab: claims of papers, put to the test on this machine."""
