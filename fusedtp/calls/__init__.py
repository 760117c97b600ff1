"""From a public function to its schedule: checked arguments, a call that is made once, and the path it is run by."""
